"""aiockpt, as its README has it."""

import sys

import aiockpt
from benchmarks.same_job import job


def main(folder: str) -> None:
    model, optimizer, scheduler = job.build()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    # No contender saves a last step that is no multiple.
    with aiockpt.Checkpointer(folder, every=job.EVERY, retention=aiockpt.Retention(last=3), save_last=False) as ckpt:
        for step in range(ckpt.resume(state), job.STEPS):
            job.train(step, model, optimizer, scheduler)
            ckpt.step(step, state)


if __name__ == "__main__":
    main(sys.argv[1])
