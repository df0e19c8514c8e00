// heat.h: a matrix of heads as a strip of cells, cold to hot.

#ifndef BELLWETHER_CLI_HEAT_H_
#define BELLWETHER_CLI_HEAT_H_

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "bellwether/v1/query.pb.h"

namespace bellwether::cli {

// Where a value lies between the extremes of a matrix: on a logarithmic scale
// if all are positive, since a failing head is tens of times its peers, not a
// rank above them.
class HeatScale {
 public:
  explicit HeatScale(std::span<const float> values);

  // 0..1; infinite values are the ends, NaN is NaN, and all is cold if all are
  // the same.
  double Place(float value) const;
  float low() const { return low_; }
  float high() const { return high_; }

 private:
  double Scaled(float value) const;

  float low_ = 0, high_ = 0;
};

enum class Palette {
  kPlain,  // Characters, for terminals without colours and for NO_COLOR.
  k256,
  kTrueColour,
};
// What this terminal has; COLORTERM says whether it has true colours.
Palette TerminalPalette();

// Layers down, heads across, in at most `width` columns and `rows_max` lines of
// cells: where the matrix is larger, a cell is the hottest of several.  A title
// with the scale before it, the heads' numbers after it.
std::vector<std::string> HeatStrip(const v1::GetMatrixResponse& matrix, size_t width, size_t rows_max, Palette palette);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_HEAT_H_
