"""Write patients.csv: scikit-learn's breast-cancer data, dealt to hospitals of other malignancy.

    pip install scikit-learn
    python examples/breast_cancer.py patients.csv

569 patients with 30 measurements each. Every hospital draws its share of malignant tumours, without
replacement, from a generator with seed 0.
"""

from __future__ import annotations

import sys

import numpy as np

try:
    from sklearn.datasets import load_breast_cancer
except ImportError:
    sys.exit("breast_cancer.py needs scikit-learn for its data: pip install scikit-learn")

# Hospital -> (patients, share of malignant ones); together all 569 patients, 212 of them malignant.
HOSPITALS = {
    "north": (120, 0.75),
    "south": (140, 0.10),
    "east": (110, 0.35),
    "west": (99, 0.45),
    "coast": (100, 0.25),
}


def write(path: str) -> None:
    """The table as CSV: hospital, outcome, then the measurements."""
    frame = load_breast_cancer(as_frame=True).frame
    malignant = frame.pop("target") == 0
    generator = np.random.default_rng(0)
    pools = [generator.permutation(np.flatnonzero(malignant == ill)).tolist() for ill in (0, 1)]
    site = np.empty(len(frame), dtype=object)
    for hospital, (patients, share) in HOSPITALS.items():
        ill = round(share * patients)
        for pool, count in zip(pools, (patients - ill, ill), strict=True):
            site[[pool.pop() for _ in range(count)]] = hospital
    frame.insert(0, "hospital", site)
    frame.insert(1, "outcome", np.where(malignant, "malignant", "benign"))
    frame.to_csv(path, index=False)


if __name__ == "__main__":
    write(sys.argv[1])
