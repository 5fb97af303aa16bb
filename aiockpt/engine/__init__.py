"""The operations: how a state is saved (`save`), loaded (`load`) and maintained (`maintenance`), as coroutines.

Everything here runs on the engine's loop thread; only `aiockpt.engine.job.SaveJob.copy` runs where the state does not
change. The thread-safe face is `aiockpt.session.checkpointer`.
"""
