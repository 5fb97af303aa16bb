"""Run by a Python that has ModelExpress: its own receiver follows versions in S3, and writes what it made of each.

python modelexpress_reader.py ENDPOINT URL SEED FOLDER FIRST LAST
"""

import json
import shutil
import sys
from pathlib import Path

from modelexpress_rl.inference.receiver import (  # type: ignore[import-not-found]
    ObjectStorageGeneratorConfig,
    _LocalCheckpoint,
    _S3Version,
)
from modelexpress_rl.object_storage import ObjectStorageType  # type: ignore[import-not-found]
from modelexpress_rl.s3 import S3Client  # type: ignore[import-not-found]
from modelexpress_rl.train import WeightPayloadFormat  # type: ignore[import-not-found]


def main(endpoint: str, url: str, seed: str, folder: str, first: int, last: int) -> None:
    """Follow the chain from the version *first*, which is at *seed*, to *last*, in two leaps."""
    client = S3Client(endpoint_url=endpoint, region_name="us-east-1")
    config = ObjectStorageGeneratorConfig(ObjectStorageType.S3, f"{first:06d}", seed, f"{folder}/cache")
    local = _LocalCheckpoint(model_name="policy", config=config, s3=client)
    local.initialize()
    chain: list[_S3Version] = []
    for number in range(first + 1, last + 1):
        uri = f"{url}/weight_v{number:06d}/model.safetensors.index.json"
        base = json.loads(client.get(uri))["metadata"].get("base_version")
        kind = WeightPayloadFormat.FULL_HF_CHECKPOINT if base is None else WeightPayloadFormat.XOR_DELTA
        if base is None:
            chain.clear()
        chain.append(_S3Version(f"{number:06d}", base, kind, uri))
    for part in (chain[: len(chain) // 2], chain[len(chain) // 2 :]):
        if part:
            prepared = local.prepare_chain(tuple(part))
            with local.installation_context(prepared, activate=True):
                target = Path(folder) / prepared.target_version
                shutil.copytree(prepared.path, target)
    client.close()


if __name__ == "__main__":
    server, place, base, where, begin, end = sys.argv[1:]
    main(server, place, base, where, int(begin), int(end))
