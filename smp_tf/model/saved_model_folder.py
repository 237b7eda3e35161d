"""Puts a SavedModel into a folder, where it replaces only an earlier one.

    what is there                        how the new model takes its place
    nothing, or an earlier model alone   the whole folder is exchanged
    other things too                     entry by entry, saved_model.pb last: without it there is no model

The second way is also used for a folder that nobody can rename, such as a mount point. If the process is killed
meanwhile, no model is left that mixes both. The earlier one's entries are in place, or in a folder .replaced-* there,
until the new one is whole. Neither way touches files that are not a SavedModel's own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence

from smp_tf.announce import tell
from smp_tf.errors import StepError
from smp_tf.files import durable_files, mounts

_DECIDES = "saved_model.pb"
_FILES = frozenset({_DECIDES, "keras_metadata.pb", "fingerprint.pb"})
_FOLDERS = frozenset({"variables", "assets", "assets.extra"})


def require_file_place(path: str) -> None:
    """Raises an error where a file of this name cannot be written, before anything is computed.

    Args:
        path: of the file.

    Raises:
        StepError: the path is a folder or a mount point.
    """
    if os.path.isdir(path):
        raise StepError(f"A file takes the place of no folder, and {path!r} is one. Give another path.")
    if os.path.lexists(path) and mounts.is_mount(path):
        raise StepError(f"{path!r} is a mount point, which no other file can replace. Give another path.")


def require_folder_place(path: str) -> None:
    """Raises an error where a SavedModel of this name cannot be written, before anything is computed.

    Args:
        path: of the folder.

    Raises:
        StepError: the path, or an entry in it with the name of a SavedModel's entry, is something else.
    """
    if os.path.lexists(path) and not os.path.isdir(path):
        raise StepError(f"A SavedModel is a folder, and {path!r} is none. Remove it, or give another path.")
    for name in sorted(_FILES | _FOLDERS):
        entry = os.path.join(path, name)
        if os.path.lexists(entry) and os.path.isdir(entry) != (name in _FOLDERS):
            kind = "folder" if name in _FOLDERS else "file"
            raise StepError(
                f"{entry!r} must be a SavedModel's {kind} of this name, and is something else. Rename it, or give "
                f"another path."
            )


@contextlib.contextmanager
def building(path: str) -> Iterator[str]:
    """Gives a path to write a SavedModel to, on the file system of its place, as `durable_files.building` does.

    Args:
        path: path of the folder that it will be in. Where the path is a link to a folder, that folder is meant.
    """
    place = os.path.realpath(path)
    inside = os.path.join(place, os.path.basename(place) or "model")
    with durable_files.building(inside if os.path.isdir(place) and _is_shared(place) else place) as built:
        yield built


def put_in_place(built: str, path: str) -> None:
    """Puts a SavedModel in its place for good.

    Args:
        built: what was written, completely, in a folder that `building` made.
        path: its place.

    Raises:
        OSError: it cannot be synced or renamed. What was there before is unchanged, or the message says where it is.
    """
    place = os.path.realpath(path)
    if not os.path.isdir(place):
        durable_files.put_in_place(built, place)
        return
    for name in sorted(_FOLDERS):
        _keep_others(os.path.join(place, name), os.path.join(built, name))
    if _is_inside(built, place) or _is_shared(place):
        durable_files.sync_tree(built)
        _put_entries(built, place)
    else:
        durable_files.put_in_place(built, place, _bring_others)


def _is_inside(built: str, place: str) -> bool:
    return os.path.dirname(os.path.dirname(built)) == place


def _is_shared(place: str) -> bool:
    """Returns whether a folder has more than a SavedModel, so that the folder itself must stay."""
    return (
        any(name not in _FILES | _FOLDERS for name in os.listdir(place))
        or mounts.is_mount(place)
        or os.path.samefile(place, os.curdir)
        or not os.access(os.path.dirname(place), os.W_OK)
    )


def _keep_others(earlier: str, built: str) -> None:
    """Copies files of the earlier model's folder that are not the model's values into that of the new model."""
    if not os.path.isdir(earlier):
        return
    for folder, folders, files in os.walk(earlier):
        target = os.path.normpath(os.path.join(built, os.path.relpath(folder, earlier)))
        os.makedirs(target, exist_ok=True)
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))):
            source, kept = os.path.join(folder, name), os.path.join(target, name)
            is_value = os.path.basename(earlier) == "variables" and name.startswith("variables.")
            if is_value or os.path.lexists(kept):
                continue
            try:
                os.link(source, kept, follow_symlinks=False)
            except OSError:
                shutil.copy2(source, kept, follow_symlinks=False)


def _bring_others(earlier: str, place: str) -> None:
    """Moves files that somebody has put into a folder, just before it was replaced, to the new one."""
    for name in sorted(set(os.listdir(earlier)) - _FILES - _FOLDERS):
        try:
            if os.path.lexists(os.path.join(place, name)):
                raise FileExistsError
            os.rename(os.path.join(earlier, name), os.path.join(place, name))
        except OSError as error:
            kept = f"{_replaced(os.path.dirname(place))}-{os.path.basename(place)}"
            os.rename(earlier, kept)
            tell(f"smp_tf: {name} was written into {place} while it was replaced, and is in {kept} ({error}).")
            return


def _replaced(folder: str) -> str:
    return os.path.join(folder, f".replaced-{secrets.token_hex(8)}")


def _put_entries(built: str, place: str) -> None:
    """Replaces the entries of an earlier model. Its saved_model.pb is removed first, and the new one comes last."""
    new = sorted(os.listdir(built), key=lambda name: (name == _DECIDES, name))
    names = [_DECIDES, *sorted({*_FILES, *_FOLDERS, *new} - {_DECIDES})]
    kept = _replaced(place)
    os.mkdir(kept)
    try:
        for name in names:
            if os.path.lexists(os.path.join(place, name)):
                os.rename(os.path.join(place, name), os.path.join(kept, name))
        for name in new:
            if name == _DECIDES:
                durable_files.sync(place)
            os.rename(os.path.join(built, name), os.path.join(place, name))
        durable_files.sync(place)
    except BaseException as error:
        _take_back(new, names, built, place, kept, error)
        raise
    durable_files.remove(kept)


def _take_back(
    new: Sequence[str], names: Sequence[str], built: str, place: str, kept: str, reason: BaseException
) -> None:
    """Puts back the earlier model's entries, each even if another one fails, and saved_model.pb last."""
    is_whole = True
    moves = [(place, built, name) for name in reversed(new) if not os.path.lexists(os.path.join(built, name))]
    moves += [(kept, place, name) for name in reversed(names) if os.path.lexists(os.path.join(kept, name))]
    for source, target, name in moves:
        try:
            if name == _DECIDES and source == kept and not is_whole:
                continue
            os.rename(os.path.join(source, name), os.path.join(target, name))
        except OSError:
            is_whole = False
    if is_whole:
        durable_files.remove(kept)
    else:
        tell(
            f"smp_tf: the model in {place} could not be replaced ({reason}), nor put back. What is in {kept} belongs "
            f"to it: move that to {place} by hand."
        )
