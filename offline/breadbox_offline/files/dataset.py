"""`Dataset`: episodes of a file or a directory of files, read as a stream."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.validation import validate_episodes
from breadbox_offline.errors import OfflineDataError, UnsupportedDatasetError, placed
from breadbox_offline.files.manifest import MANIFEST_NAME, read_manifest
from breadbox_offline.files.minari_dataset import MINARI_SCHEME, read_minari
from breadbox_offline.files.readers import RowBatch, is_readable, read_file
from breadbox_offline.report import ValidationPolicy, ValidationReport
from breadbox_offline.rows.assembly import RowAssembler
from breadbox_offline.rows.options import MappingOptions
from breadbox_offline.training.prelearner import InputMode, detect_mode, map_columns


@dataclass(slots=True)
class Dataset:
    """Recorded episodes at a path.

    The path is a file (Parquet, JSON lines, msgpack), a directory of such files (read in the order
    of their names), a folder that `breadbox generate` wrote, or `minari:NAME` for a local Minari
    dataset. The columns of each file show what its rows are.

    Attributes:
        report: Everything found so far; grows while episodes are read.
    """

    path: str
    mapping: MappingOptions = field(default_factory=MappingOptions)
    policy: ValidationPolicy = field(default_factory=ValidationPolicy)
    batch_rows: int = 4096
    """Rows read at a time."""
    report: ValidationReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = ValidationReport(self.policy)

    def episodes(self) -> Iterator[Episode]:
        """Yield every episode that passes validation, in order; rows of one may span files.

        Raises:
            UnsupportedDatasetError: There is nothing readable.
            OfflineDataError: A file is malformed; names file, row and column. Episodes before it
                have been yielded.
        """
        for found in self._mapped():
            yield from validate_episodes(found, self.report)

    def _mapped(self) -> Iterator[list[Episode]]:
        if self.path.startswith(MINARI_SCHEME):
            limits = self.mapping.limits
            yield from ([episode] for episode in read_minari(self.path, limits=limits))
            return
        path = Path(self.path)
        if path.name == MANIFEST_NAME or (path / MANIFEST_NAME).exists():
            limits = self.mapping.limits
            yield from ([each] for each in read_manifest(path, self.report, limits=limits))
            return
        assembler = RowAssembler(self.mapping, self.report)
        for file in self._files(path):
            self.report.file = str(file)
            for batch in read_file(file, batch_rows=self.batch_rows, limits=self.mapping.limits):
                with placed(file=batch.file, row_offset=batch.first_row):
                    yield self._map(batch, assembler)
        self.report.file, self.report.row_offset = None, 0
        yield assembler.finish()

    def _files(self, path: Path) -> list[Path]:
        if not path.exists():
            raise UnsupportedDatasetError("does not exist", file=str(path))
        files = [path] if path.is_file() else sorted(filter(is_readable, path.rglob("*")))
        if not files:
            raise UnsupportedDatasetError("holds no file that can be read", file=str(path))
        folder = path.resolve()
        for file in files:
            # A folder's author must not choose files outside it to be read.
            if not file.resolve().is_relative_to(folder):
                raise OfflineDataError(
                    "is a link out of its folder; read the target by its own name",
                    file=str(file),
                )
            if not file.is_file():
                raise OfflineDataError("is no file", file=str(file))
        return files

    def _map(self, batch: RowBatch, assembler: RowAssembler) -> list[Episode]:
        mode = detect_mode(batch.columns, self.mapping)
        # The assembler numbers rows itself, because some of them wait for later batches.
        self.report.row_offset = 0 if mode is InputMode.COLUMNS else batch.first_row
        return map_columns(
            batch.columns, mode, self.mapping, self.report, assembler, first_row=batch.first_row
        )
