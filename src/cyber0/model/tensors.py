"""Named tensors as a safetensors file, in whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from cyber0.errors import DataError
from cyber0.storage import replacing


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, about: dict[str, str] | None = None, *, durable: bool = True,
    private: bool = False,
) -> None:  # fmt: skip
    """Write tensors and the metadata `about` them, with the mode of any new file (safetensors' own is 0600).

    What `durable` and `private` mean is said at `cyber0.storage.replacing`.
    """
    whole = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with replacing(path, durable=durable, private=private) as temporary:
        try:
            save_file(whole, temporary, metadata=about)
        except OSError:
            raise
        except Exception as error:  # safetensors' own error type is not public in every version
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number:  # what the system refused: `replacing` names the file and the remedy
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise DataError(f"{path} can't be written: {' '.join(str(error).split())}") from error
