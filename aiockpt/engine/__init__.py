"""The story: how a state is saved (`save`), loaded (`load`) and kept (`keep`), as coroutines to read in one sitting.

Everything here runs on the engine's loop thread; only `ticket.Ticket.copy` runs where the state can be held still.
The thread-safe face is `aiockpt.checkpointer`.
"""
