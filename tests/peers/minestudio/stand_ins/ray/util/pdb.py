def set_trace():
    raise RuntimeError("MineStudio would wait for a debugger here")
