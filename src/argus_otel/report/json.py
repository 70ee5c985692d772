"""The document ``argus.findings/1``, for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from argus_otel.report.view import document_of
from argus_otel.tables.findings import diagnosis_document

if TYPE_CHECKING:
    from argus_otel.report.view import RunView


def render_json(view: RunView) -> str:
    """One JSON document, links included where the address of the pages is known."""
    document = document_of(view, diagnosis_document(view.run.run, view.diagnosis))
    return json.dumps(document, ensure_ascii=False, indent=2)
