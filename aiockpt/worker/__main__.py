"""``python -m aiockpt.worker``: the writer process; started by `aiockpt.worker.process`, by nobody else."""

from aiockpt.worker.service import main

if __name__ == "__main__":
    main()
