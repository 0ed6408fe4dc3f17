"""Make src/vitral/data/sources/digits.npz from scikit-learn's copy of the UCI optical digits (CC BY 4.0).

1,797 grey images of 8 x 8 pixels, values 0 to 16: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, 1998, doi:10.24432/C50P49.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TARGET = Path(__file__).parents[1] / "src" / "vitral" / "data" / "sources" / "digits.npz"


def main() -> None:
    """Write the file."""
    digits = load_digits()
    pixels, labels = digits.data.astype(np.uint8), digits.target.astype(np.uint8)  # type: ignore[attr-defined]
    assert pixels.shape == (1797, 64)
    assert pixels.max() == 16
    # The split is scikit-learn's own, so that its classifiers can be compared on the same images:
    # train_test_split(..., test_size=0.2, stratify=labels, random_state=0).
    _, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    # Column by column the values repeat more, which the compression likes.
    np.savez_compressed(
        TARGET, pixels=np.ascontiguousarray(pixels.T), labels=labels, test=np.sort(test).astype(np.uint16)
    )
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
