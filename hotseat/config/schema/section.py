"""The base of all sections, and the types of their values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # at 1 an average would never take anything in
Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]
Seconds = AboveZero
Port = Annotated[int, Field(ge=0, le=65535)]
NonEmpty = Annotated[str, Field(min_length=1)]
FUNCTION, CLASS = r"^.+\.py:\w+$", r"^.+:\w+$"
FORMS = {FUNCTION: "FILE.py:FUNCTION", CLASS: "FILE.py:CLASS or package.module:CLASS"}  # patterns in words
FunctionPath = Annotated[str, Field(pattern=FUNCTION)]


class Section(BaseModel):
    """A frozen part of the tree in which an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
