"""The job without checkpoints: what the lines of the others are counted against."""

import sys

from benchmarks.same_job import job


def main(folder: str) -> None:
    model, optimizer, scheduler = job.build()
    for step in range(job.STEPS):
        job.train(step, model, optimizer, scheduler)


if __name__ == "__main__":
    main(sys.argv[1])
