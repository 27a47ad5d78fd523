from numpy.typing import NDArray

def scan(values: NDArray[object]) -> tuple[float, float, int]:
    """Range and non-finite count of pixels, in one pass, without the GIL.

    `values`: C-contiguous float32 CPU array (NumPy or any DLPack exporter) of any shape.
    Returns (minimum, maximum, nonfinite); minimum and maximum cover the finite values only
    and are +inf and -inf when there are none. TypeError for another dtype or layout.
    """
