"""Divisors of whole numbers."""

__all__ = ["divisors", "nearest_multiple"]


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    large = [number // n for n in reversed(small) if n * n != number]
    return (*small, *large)


def nearest_multiple(number: int, base: int) -> tuple[int, ...]:
    """Return the multiples of ``base`` next to ``number``, itself alone where it is one.

    >>> nearest_multiple(13, 4), nearest_multiple(3, 4), nearest_multiple(8, 4)
    ((12, 16), (4,), (8,))
    """
    below = number // base * base
    if below == number:
        return (number,)
    return tuple(n for n in (below, below + base) if n > 0)
