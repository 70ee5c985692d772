"""What the tests of the converters share: the real traces, and a run read back from a store."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from argus_otel.convert.conversion import Account
from argus_otel.store.bulk import write_run
from argus_otel.store.parquet import ParquetStore
from argus_otel.tables.schemas import RunSummary, RunTables

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Converted:
    """A conversion that went through a store."""

    summary: RunSummary
    tables: RunTables
    account: Account

    def rows(self, table: str, **wanted):
        """Rows of a table with these values."""
        return [
            row
            for row in getattr(self.tables, table).to_pylist()
            if all(row[name] == value for name, value in wanted.items())
        ]

    def group(self, description: str, *ranks: int) -> int:
        """Key of a group."""
        (found,) = self.rows("groups", description=description, ranks=list(ranks))
        return found["group"]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real traces."""
    return DATA


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """Write conversions into a store and read them back, by run id."""

    def store(conversions) -> dict[str, Converted]:
        folder = tmp_path_factory.mktemp("store")
        found = {}
        for conversion in conversions:
            summary = write_run(folder, conversion.summary, conversion.blocks)
            tables = ParquetStore(folder).read(summary)
            found[summary.run_id] = Converted(summary, tables, conversion.account)
        return found

    return store


@pytest.fixture
def unpack(data, tmp_path):
    """Unpack an archive of the real traces; gives the folder."""

    def unpack(name: str) -> Path:
        with tarfile.open(data / name) as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path

    return unpack
