// precompiled.h: what most tests include, parsed once a build; see server/util/precompiled.h.

#ifndef BELLWETHER_TESTS_SUPPORT_PRECOMPILED_H_
#define BELLWETHER_TESTS_SUPPORT_PRECOMPILED_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <random>

#include "server/util/precompiled.h"

#endif  // BELLWETHER_TESTS_SUPPORT_PRECOMPILED_H_
