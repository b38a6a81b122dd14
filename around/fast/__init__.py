"""Speed and nothing else: without this folder (--plain) the same text comes, later.

Nothing here changes what a model computes, but for rounding, which in bfloat16 now and then gives
another token: every path has a slow twin at the root, and tests that equate the two. The door is
make_fast. It changes a finished model in place, by hooks and by other forms of its Linears; the
files of the root import nothing of it.
"""

from typing import Any


def make_fast(
    model: Any, compiled: bool = False, batch_size: int | None = None, kv_dtype: str = "auto"
) -> None:
    """Make a finished model fast, in place: compile it, or do only what takes little time.

    Args:
        batch_size: how many sequences the static cache holds with which it will run; None: it will
            run with a paged cache.

    Raises:
        SettingError, InputError: see compiling.compile_model.
    """
    from .attending import attend_fast
    from .threads import spinning

    device = model.device.type
    model.register_forward_pre_hook(lambda *_: spinning.adapt())
    if compiled:
        from .compiling import compile_model

        compile_model(model, batch_size, kv_dtype)
    else:
        attend_fast(model)
        if device == "cpu":
            from .packed import pack_linears

            pack_linears(model, compiled=False)
    if device == "cuda" and batch_size:
        from .compiling import replay_steps

        replay_steps(model)
