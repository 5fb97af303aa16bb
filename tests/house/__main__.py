"""`make house`: each figure, its ceiling and its aim; ``--lower`` has the ceilings follow what is measured."""

import argparse
import sys

from tests.house.ceilings import Ceiling, lowered, measure_path, measure_source, read_ceilings, write_ceilings


def main() -> int:
    """Print the table; return 1 where a figure is above its ceiling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to what is measured")
    lower = parser.parse_args().lower
    ceilings = read_ceilings()
    measured = measure_source() | measure_path()
    above = 0
    for name, figure in measured.items():
        ceiling = ceilings.get(name)
        most = float("inf") if ceiling is None else ceiling.most
        aim = None if ceiling is None else ceiling.aim
        above += figure > most
        verdict = "ABOVE" if figure > most else "" if aim is None else "met" if figure <= aim else f"aim {aim:g}"
        sys.stdout.write(f"{name:46}{figure:>10,.10g}  of {most:>10,.10g}   {verdict}\n")
    if lower:
        none = Ceiling(float("inf"))
        write_ceilings({name: lowered(ceilings.get(name, none), name, figure) for name, figure in measured.items()})
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
