import os
import stat
import threading

import pytest

from batchbayes._common.atomic import atomic_path


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_has_the_permissions_of_any_new_file(tmp_path, monkeypatch, mask, replaced):
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask belongs to the whole process"))
            with atomic_path(tmp_path / "file") as partial:
                if replaced:  # as safetensors does
                    partial.unlink()
                    os.close(os.open(partial, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_many_threads_leave_one_whole_file(tmp_path):
    texts, failures, barrier = [str(number) * 10_000 for number in range(8)], [], threading.Barrier(8)

    def write(text):
        try:
            barrier.wait()
            for _ in range(10):
                with atomic_path(tmp_path / "file") as partial:
                    partial.write_text(text)
                assert (tmp_path / "file").read_text() in texts
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_is_absent_is_an_error_before_any_work(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "absent" / "file"):
        pytest.fail("the block must not run")
