#include "cli/heat.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "cli/output.h"

namespace bellwether::cli {
namespace {

constexpr std::string_view kRamp = " .:-=+*#%@";
constexpr char kNoNumber = '?';
constexpr size_t kScaleCells = 10;

struct Rgb {
  double r, g, b;
};

// Dark to bright, and the same order without hue.
Rgb ColourAt(double place) {
  static constexpr Rgb kAnchors[] = {{68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}};
  const double at = std::clamp(place, 0.0, 1.0) * 4;
  const auto below = std::min(static_cast<size_t>(at), size_t{3});
  const Rgb &a = kAnchors[below], &b = kAnchors[below + 1];
  const double part = at - static_cast<double>(below);
  return {a.r + part * (b.r - a.r), a.g + part * (b.g - a.g), a.b + part * (b.b - a.b)};
}

// The nearest level of the terminal's 6 x 6 x 6 cube.
int CubeLevel(double value) {
  static constexpr int kLevels[] = {0, 95, 135, 175, 215, 255};
  int best = 0;
  for (int i = 1; i < 6; ++i) {
    if (std::abs(kLevels[i] - value) < std::abs(kLevels[best] - value)) best = i;
  }
  return best;
}

// `width` columns of one cell.
std::string CellText(double place, size_t width, Palette palette) {
  if (std::isnan(place)) return std::string(width, kNoNumber);
  if (palette == Palette::kPlain) {
    return std::string(
        width, kRamp[std::min(static_cast<size_t>(place * static_cast<double>(kRamp.size())), kRamp.size() - 1)]);
  }
  const Rgb colour = ColourAt(place);
  std::string text = "\x1b[48;";
  if (palette == Palette::k256) {
    text += "5;" + std::to_string(16 + 36 * CubeLevel(colour.r) + 6 * CubeLevel(colour.g) + CubeLevel(colour.b));
  } else {
    const auto byte = [](double value) { return std::to_string(std::lround(value)); };
    text += "2;" + byte(colour.r) + ";" + byte(colour.g) + ";" + byte(colour.b);
  }
  return text + "m" + std::string(width, ' ') + "\x1b[0m";
}

// "L3", or "L4-7".
std::string Span(char what, size_t begin, size_t end) {
  std::string text(1, what);
  text.append(std::to_string(begin));
  if (end - begin > 1) text.append(1, '-').append(std::to_string(end - 1));
  return text;
}

std::string Padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

}  // namespace

HeatScale::HeatScale(std::span<const float> values) {
  bool any = false;
  for (const float value : values) {
    if (!std::isfinite(value)) continue;
    low_ = any ? std::min(low_, value) : value;
    high_ = any ? std::max(high_, value) : value;
    any = true;
  }
}

double HeatScale::Scaled(float value) const { return low_ > 0 ? std::log(static_cast<double>(value)) : double{value}; }

double HeatScale::Place(float value) const {
  if (std::isnan(value)) return std::numeric_limits<double>::quiet_NaN();
  if (std::isinf(value)) return value > 0 ? 1 : 0;
  if (low_ == high_) return 0;
  return std::clamp((Scaled(value) - Scaled(low_)) / (Scaled(high_) - Scaled(low_)), 0.0, 1.0);
}

Palette TerminalPalette() {
  if (!Colours()) return Palette::kPlain;
  const char* const term = std::getenv("COLORTERM");
  const std::string_view colours = term == nullptr ? "" : term;
  return colours == "truecolor" || colours == "24bit" ? Palette::kTrueColour : Palette::k256;
}

std::vector<std::string> HeatStrip(const v1::GetMatrixResponse& matrix, size_t width, size_t rows_max,
                                   Palette palette) {
  const size_t layers = matrix.layers(), heads = matrix.heads();
  if (matrix.values_size() == 0 || layers * heads != static_cast<size_t>(matrix.values_size())) {
    return {CutTo("no sample of " + Clean(SignalText(matrix.signal())) + " yet", width)};
  }
  const std::span<const float> values(matrix.values().data(), layers * heads);
  const HeatScale scale(values);
  const auto ceiling = [](size_t all, size_t parts) { return (all + parts - 1) / parts; };
  const size_t layers_a_row = ceiling(layers, std::max<size_t>(rows_max, 1));
  const size_t margin = Span('L', layers - layers_a_row, layers).size() + 1;
  const size_t columns = std::max<size_t>(width > margin ? width - margin : 0, 1);
  const size_t heads_a_cell = ceiling(heads, columns);
  const size_t cells = ceiling(heads, heads_a_cell);
  const size_t cell_width = std::clamp<size_t>(columns / cells, 1, 4);

  const std::string before =
      Clean(SignalText(matrix.signal())) + " at step " + Integer(matrix.step()) + "  " + Number(scale.low(), 3) + " ";
  std::string after(1, ' ');
  after += Number(scale.high(), 3);
  if (layers_a_row > 1 || heads_a_cell > 1) {
    after += "  a cell: the largest of " + std::to_string(layers_a_row * heads_a_cell) + " heads";
  }
  const auto without = std::count_if(values.begin(), values.end(), [](float value) { return std::isnan(value); });
  if (without > 0) after += "  ? no number: " + std::to_string(without) + (without == 1 ? " head" : " heads");
  std::string title = CutTo(before, width);
  if (const size_t taken = Width(before) + kScaleCells; taken < width) {
    for (size_t i = 0; i < kScaleCells; ++i) {
      title += CellText(static_cast<double>(i) / (kScaleCells - 1), 1, palette);
    }
    title += CutTo(after, width - taken);
  }

  std::vector<std::string> lines = {std::move(title)};
  for (size_t top = 0; top < layers; top += layers_a_row) {
    const size_t bottom = std::min(top + layers_a_row, layers);
    std::string line = Padded(Span('L', top, bottom), margin);
    for (size_t left = 0; left < heads; left += heads_a_cell) {
      double hottest = std::numeric_limits<double>::quiet_NaN();
      for (size_t layer = top; layer < bottom; ++layer) {
        for (size_t head = left; head < std::min(left + heads_a_cell, heads); ++head) {
          hottest = std::fmax(hottest, scale.Place(values[layer * heads + head]));
        }
      }
      line += CellText(hottest, cell_width, palette);
    }
    lines.push_back(std::move(line));
  }
  const std::string last = Span('H', heads - 1, heads);
  std::string axis = Padded("", margin) + "H0";
  const size_t end = margin + cells * cell_width;
  if (end >= axis.size() + 1 + last.size()) axis = Padded(axis, end - last.size()) + last;
  lines.push_back(std::move(axis));
  return lines;
}

}  // namespace bellwether::cli
