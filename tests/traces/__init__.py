"""What does aiockpt ask of the storage? Recorded for thirty scenarios, and compared: nothing may change by accident."""
