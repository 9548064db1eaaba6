"""Secrets kept out of everything that a run writes, reports or sends.

What is secret is told by the name of a variable or option (its words: key, token, password), by the form of a value (a
URL with a password in it, a bearer header, the tokens of well-known services), and by being the value of a variable
whose name says so. A value is replaced, never shortened: a piece of a secret is a hint. What is recorded, and where, is
not known here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["MASK", "Masker", "is_secret_name"]

MASK: Final = "***"
_WORDS: Final = frozenset({"auth", "authorization", "bearer", "cookie", "credential", "credentials"}) | {
    *("key", "pass", "passphrase", "passwd", "password", "pat", "pwd", "secret", "secrets", "token"),
}
_ENDINGS: Final = ("apikey", "accesskey", "authtoken", "accesstoken", "password", "passwd", "secret")
_LEAST_CHARACTERS: Final = 6
"""Shorter values of secret variables stay where they stand in other text: masked, "1" would hollow out everything."""
_IN_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.\-]*://)[^\s/@'\"]+(?:@[^\s/@'\"]+)*@", re.IGNORECASE)
_IN_QUERY: Final = re.compile(r"(?P<name>[?&;][\w.\-\[\]]+=)(?P<value>[^&;#\s'\"]+)")
_ASSIGNED: Final = re.compile(r"(?P<name>[\w.\-]+)[\"']?\s*[=:]\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&'\"]+)")
_SHAPES: Final = re.compile(
    r"""\b(?:
        gh[pousr]_\w{20,} | github_pat_\w{20,} | glpat-[\w\-]{16,}      # GitHub, GitLab
      | hf_\w{20,} | wandb_v\d_\w{20,} | dapi[0-9a-f]{32}               # Hugging Face, W&B, Databricks
      | sk-[\w\-]{16,} | xox[abpr]-[\w\-]{10,} | AKIA[0-9A-Z]{16} | AIza[\w\-]{35}
      | eyJ[\w\-]{6,}\.[\w\-]{6,}\.[\w\-]*                              # a JSON web token
    )""",
    re.VERBOSE,
)
_BEARER: Final = re.compile(r"\b(?P<kind>bearer|basic)\s+[\w.\-+/=~]{8,}", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Return whether a variable, option or key of this name holds a secret.

    >>> [is_secret_name(name) for name in ("WANDB_API_KEY", "--hf-token", "db.password", "PGPASSWORD", "authToken")]
    [True, True, True, True, True]
    >>> [is_secret_name(name) for name in ("--data.tokenizer", "tokens_per_s", "KEYBOARD", "MASTER_PORT")]
    [False, False, False, False]
    """
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return any(word.lower() in _WORDS or word.lower().endswith(_ENDINGS) for word in words)


@dataclass(frozen=True, slots=True)
class Masker:
    """Replaces secrets by ``***``.

    Attributes:
        known: values that are secret wherever they stand, longest first.
    """

    known: tuple[str, ...] = ()

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> "Masker":
        """Return one that knows the values of the variables whose names say that they are secret."""
        found = {value for name, value in environ.items() if is_secret_name(name) and len(value) >= _LEAST_CHARACTERS}
        # A path (of a key file, of an agent's socket) is no secret and stands in many other texts.
        return cls(tuple(sorted((value for value in found if not value.startswith("/")), key=len, reverse=True)))

    def text(self, text: str) -> str:
        """Return ``text`` without the secrets in it.

        >>> Masker(("sesame-7",)).text("https://me:pw@host/x?token=abc opened by sesame-7")
        'https://***@host/x?token=*** opened by ***'
        >>> Masker().text("401 for api_key=abc, steps=100, Authorization: Bearer abcdefgh")
        '401 for api_key=***, steps=100, Authorization: Bearer ***'
        """
        for secret in self.known:
            text = text.replace(secret, MASK)
        text = _IN_URL.sub(rf"\g<scheme>{MASK}@", text)
        text = _BEARER.sub(rf"\g<kind> {MASK}", text)
        text = _IN_QUERY.sub(_masked_value, text)
        text = _ASSIGNED.sub(_masked_value, text)
        return _SHAPES.sub(MASK, text)

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return variables with the values of secret ones replaced.

        >>> Masker().variables({"HF_TOKEN": "abc", "HF_HOME": "/models"})
        {'HF_TOKEN': '***', 'HF_HOME': '/models'}
        """
        return {name: MASK if is_secret_name(name) else self.text(value) for name, value in environ.items()}

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return a command line with the values of secret options replaced.

        >>> Masker().command(["train", "--api-key", "abc", "--token=def", "--data.tokenizer", "t.json"])
        ('train', '--api-key', '***', '--token=***', '--data.tokenizer', 't.json')
        """
        masked: list[str] = []
        follows_secret = False
        for word in words:
            name, equals, _ = word.partition("=")
            option = word.startswith("-")
            if follows_secret and not option:
                masked.append(MASK)
            elif equals and is_secret_name(name):
                masked.append(f"{self.text(name)}={MASK}")
            else:
                masked.append(self.text(word))
            follows_secret = option and not equals and is_secret_name(name)
        return tuple(masked)

    def values(self, value: Any) -> Any:
        """Return nested mappings, sequences and texts with secrets replaced, by key as well as by form.

        >>> Masker().values({"store": {"password": "abc", "url": "ftp://a:b@c"}, "sizes": [1, 2]})
        {'store': {'password': '***', 'url': 'ftp://***@c'}, 'sizes': [1, 2]}
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                key: MASK if isinstance(inner, str) and is_secret_name(str(key)) else self.values(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self.values(inner) for inner in value)
        return value


def _masked_value(match: re.Match[str]) -> str:
    """Replace the value of an assignment, in a query or elsewhere, whose name says that it is secret."""
    if not is_secret_name(match["name"]):
        return match[0]
    if match["value"].lower() in {"bearer", "basic"}:
        return match[0]  # the secret stands behind it, and has been replaced
    quote = match["value"][0] if match["value"][0] in "\"'" else ""
    return f"{match[0][: match.start('value') - match.start()]}{quote}{MASK}{quote}"
