"""aiockpt: an asyncio checkpoint engine for PyTorch training."""
