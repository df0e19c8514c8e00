# bellwether_python_test(<prefix> <test_*.py> [LABELS ...] [TIMEOUT s] [CORES n] [WAITS] [LONG] [GROUP group]): a pytest
# file of this folder as one ctest entry.  WAITS: one that computes less than a third of its time, for a lease, an age or a
# link; it counts as half a core.  LONG: one that ./check leaves to its --long.  GROUP: one that ./check runs where the
# group's folders changed (./check --help).  Not under sanitizers: Python cannot load a library that wants a sanitizer's
# runtime first.
function(bellwether_python_test prefix file)
  cmake_parse_arguments(ARG "LONG;WAITS" "TIMEOUT;CORES;GROUP" "LABELS" ${ARGN})
  if(ARG_LONG)
    list(APPEND ARG_LABELS long)
  endif()
  list(APPEND ARG_LABELS ${ARG_GROUP})
  set_property(GLOBAL APPEND PROPERTY bellwether_python_tests ${file})
  if(NOT BELLWETHER_SERVICE OR CMAKE_CXX_FLAGS MATCHES "-fsanitize")
    return()
  endif()
  set(python ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  if(NOT EXISTS ${python})
    set(python ${Python3_EXECUTABLE})
  endif()
  string(REGEX REPLACE "^test_(.*)\\.py$" "${prefix}_\\1" name ${file})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 900)  # For a hang: where both cores are busy, each import of PyTorch takes 15 s.
  endif()
  if(NOT ARG_CORES)
    set(ARG_CORES 1)
  endif()
  math(EXPR halves "2 * ${ARG_CORES}")
  if(ARG_WAITS)
    set(halves 1)
  endif()
  add_test(NAME ${name}
    COMMAND ${python} -m pytest -q -x -p no:cacheprovider ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}" PROCESSORS ${halves}
    COST 10  # Begun before the unit tests, which fill the gaps.
    ENVIRONMENT "BELLWETHER_LIB_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY};PYTHONDONTWRITEBYTECODE=1;OMP_NUM_THREADS=1")
  if("gpu" IN_LIST ARG_LABELS)
    set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 5)  # pytest: the file has skipped itself.
  endif()
endfunction()
