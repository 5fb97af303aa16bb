"""What aiockpt asks of the storage, recorded for thirty scenarios, and compared: nothing may change by accident."""
