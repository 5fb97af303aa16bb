"""The story: how a state is saved (`save`), loaded (`load`) and looked after (`maintenance`), as coroutines to read at once.

Everything here runs on the engine's loop thread; only `aiockpt.engine.save.SaveJob.copy` runs where the state does not
change. The thread-safe face is `aiockpt.session.checkpointer`.
"""
