// module_stats_parts.h: what the CPU and the GPU share of module_stats.h.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_MODULE_STATS_PARTS_H_
#define BELLWETHER_KERNELS_MODULE_STATS_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/module_stats.h"

namespace bellwether::kernels {

// Channels are taken together in tiles, rows in parts.  Sizes alone say how many there are, so that sums
// are the same on GPUs of any size.
inline constexpr int64_t kModuleTile = 128;
inline constexpr int64_t kModuleRowsLeast = 32;
inline constexpr int64_t kModuleBlocks = 1024;

enum ModuleTotal : int { kModuleTotalLargest = 0, kModuleTotalNonfinite, kModuleTotalFourths, kModuleTotalCount };

struct ModuleParts {
  int64_t tiles = 0, parts = 0;
  int64_t rows = 0;  // Of each part, the last one has what is left.

  // Sums of squares [parts][channels], then [parts][tiles][kModuleTotalCount].
  constexpr int64_t Doubles(int64_t channels) const { return parts * (channels + tiles * kModuleTotalCount); }
};

constexpr ModuleParts PartsOfModule(int64_t rows, int64_t channels) {
  ModuleParts of;
  of.tiles = (channels + kModuleTile - 1) / kModuleTile;
  if (rows <= 0 || of.tiles == 0) return {};
  const int64_t useful = (rows + kModuleRowsLeast - 1) / kModuleRowsLeast;
  const int64_t room = of.tiles < kModuleBlocks ? kModuleBlocks / of.tiles : 1;
  const int64_t parts = useful < room ? useful : room;
  of.rows = (rows + parts - 1) / parts;
  of.parts = (rows + of.rows - 1) / of.rows;
  return of;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_MODULE_STATS_PARTS_H_
