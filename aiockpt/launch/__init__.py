"""The launcher: torch's elastic agent, which sees what its trainers do (``aiockpt run``)."""
