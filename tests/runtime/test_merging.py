"""The number of files stays small while more and more are written."""

from asyncrl.runtime.merging import MERGE_EVERY, MERGED_BYTES, Merging


def joined(files):
    """As the real ones: under the last one's name."""
    content = b"".join(file.read_bytes() for file in files)
    files[-1].write_bytes(content)
    for file in files[:-1]:
        file.unlink()


def test_the_number_of_files_grows_by_its_logarithm_and_nothing_is_lost(tmp_path):
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


def test_large_files_are_left_as_they_are(tmp_path):
    asked = []
    merging = Merging(lambda files: asked.append(len(files)))
    for number in range(4):
        path = tmp_path / str(number)
        with path.open("wb") as file:
            file.truncate(MERGED_BYTES)
        merging.add(path)
    assert asked == [1] * 4 and len(list(tmp_path.iterdir())) == 4, (
        "each is a level by itself, and goes no further"
    )
