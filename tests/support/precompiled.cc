// precompiled.cc: what carries precompiled.h; see tests/CMakeLists.txt.
