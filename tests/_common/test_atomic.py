import os
import stat
import threading

import pytest

from batchbayes._common.files import atomic_path


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


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    for text in ("first", "second"):  # the file is absent at first
        with atomic_path(tmp_path / "link") as partial:
            partial.write_text(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_text() == text


def test_a_pipe_is_not_destroyed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no regular file"), atomic_path(tmp_path / "pipe"):
        pytest.fail("the block must not run")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
