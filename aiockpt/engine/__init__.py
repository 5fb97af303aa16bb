"""The operations of one checkpointer: saves (`submit`, `job`, `save`), loads (`load`) and upkeep (`maintenance`).

Calls begin on the caller's thread or on a worker (`submit`, `SaveJob.prepare` and `copy`); all coroutines run on the loop
thread. The thread-safe object in front of them is `aiockpt.session.checkpointer.Checkpointer`.
"""
