// precompiled.h: what most files of the server include, parsed once a build under a
// sanitizer.  A file includes what it uses all the same: the Release build has none
// of this.

#ifndef BELLWETHER_SERVER_UTIL_PRECOMPILED_H_
#define BELLWETHER_SERVER_UTIL_PRECOMPILED_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#endif  // BELLWETHER_SERVER_UTIL_PRECOMPILED_H_
