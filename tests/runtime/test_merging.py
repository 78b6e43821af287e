"""Merging keeps the number of files small."""

from asyncrl.runtime.files.merging import MERGE_EVERY, MERGED_BYTES, Merging


def joined(files):
    """Merge files into the last one, as the real functions do."""
    content = b"".join(file.read_bytes() for file in files)
    files[-1].write_bytes(content)
    for file in files[:-1]:
        file.unlink()


def test_the_number_of_files_grows_logarithmically_and_nothing_is_lost(tmp_path):
    merging, most = Merging(joined), 0
    for number in range(10_000):
        path = tmp_path / f"{number:06d}"
        path.write_bytes(f"{number} ".encode())
        merging.add(path)
        most = max(most, len(list(tmp_path.iterdir())) if number % 97 == 0 else 0)
    assert most < 3 * MERGE_EVERY
    assert [
        int(word) for path in sorted(tmp_path.iterdir()) for word in path.read_text().split()
    ] == list(range(10_000))


def test_large_files_are_not_merged(tmp_path):
    merged = []
    merging = Merging(lambda files: merged.append(len(files)))
    for number in range(4):
        path = tmp_path / str(number)
        with path.open("wb") as file:
            file.truncate(MERGED_BYTES)
        merging.add(path)
    assert merged == [1] * 4 and len(list(tmp_path.iterdir())) == 4, (
        "each file fills a level alone and is not merged further"
    )
