"""Conversion of weights between checkpoints and Hugging Face folders, which every tool opens.

A folder holds ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``. Both
directions stream block by block, with bounded memory, from and to any place that a URL can name. Guarantees:

- Data read from a step is verified; shards are assembled; memory that several names share is written once.
- A half-written folder is never mistaken for a whole one, and a step is visible only when it is committed.
- Existing weights and steps are not replaced without ``replace``.

Without a second copy: ``to_hugging_face(…, link=True)`` makes a folder of links to a step's own files, and `open_weights`
reads the weights of any step where they lie.
"""

from __future__ import annotations

from aiockpt.convert.choice import Converted as Converted
from aiockpt.convert.conversions import from_hugging_face as from_hugging_face
from aiockpt.convert.conversions import to_hugging_face as to_hugging_face
from aiockpt.convert.weight_reader import Weights as Weights
from aiockpt.convert.weight_reader import open_weights as open_weights
