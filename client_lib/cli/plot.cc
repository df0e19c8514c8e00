#include "cli/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cli/output.h"

namespace bellwether::cli {
namespace {

constexpr double kLeft = 70, kRight = 110, kTop = 48, kBottom = 34;
constexpr double kLaneHeight = 15, kPanelGap = 8;
constexpr double kText = 11;
constexpr Paint kInk = {0x222222}, kFaint = {0x777777}, kGrid = {0xe4e4e4}, kExpected = {0x8a2be2};
// Okabe and Ito: told apart by the colour-blind too.
constexpr unsigned kPalette[] = {0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x000000, 0x999999};
// Beyond this ratio of the extremes a panel is logarithmic.
constexpr double kLogRatio = 20;

struct Axis {
  double begin = 0, end = 1;  // Values.
  double from = 0, to = 1;    // Pixels.
  bool logarithmic = false;

  double Scaled(double value) const { return logarithmic ? std::log10(value) : value; }
  double At(double value) const {
    const double low = Scaled(begin), high = Scaled(end);
    return from + (Scaled(value) - low) / (high - low) * (to - from);
  }
};

// 1, 2 or 5 times a power of ten, so that about `count` fit.
double NiceStep(double span, int count) {
  const double raw = span / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double part = raw / power;
  return power * (part <= 1 ? 1 : part <= 2 ? 2 : part <= 5 ? 5 : 10);
}

std::vector<double> Ticks(const Axis& axis, int count) {
  std::vector<double> ticks;
  if (axis.logarithmic) {
    const double low = std::ceil(std::log10(axis.begin) - 1e-9), high = std::floor(std::log10(axis.end) + 1e-9);
    const double every = std::max(1.0, std::ceil((high - low) / count));
    for (double power = low; power <= high; power += every) ticks.push_back(std::pow(10, power));
    if (ticks.size() >= 2) return ticks;
    ticks.clear();
    for (const double tick : {axis.begin, std::sqrt(axis.begin * axis.end), axis.end}) ticks.push_back(tick);
    return ticks;
  }
  const double step = NiceStep(axis.end - axis.begin, count);
  for (double tick = std::ceil(axis.begin / step) * step; tick <= axis.end + step * 1e-6; tick += step) {
    ticks.push_back(std::abs(tick) < step * 1e-6 ? 0 : tick);
  }
  return ticks;
}

// Of everything finite in the panel.
Axis ValueAxis(const PlotPanel& panel) {
  double low = INFINITY, high = -INFINITY;
  for (const PlotSeries& series : panel.series) {
    for (const auto* values : {&series.low, &series.mean, &series.high}) {
      for (const double value : *values) {
        if (!std::isfinite(value)) continue;
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
  }
  if (low > high) return {};
  Axis axis{.begin = low, .end = high, .logarithmic = low > 0 && high / low > kLogRatio};
  if (low == high) {
    const double room = low == 0 ? 1 : std::abs(low) / 2;
    axis.begin = low - room;
    axis.end = high + room;
  } else if (!axis.logarithmic) {
    axis.begin -= (high - low) * 0.05;
    axis.end += (high - low) * 0.05;
  } else {
    axis.begin /= 1.15;
    axis.end *= 1.15;
  }
  return axis;
}

std::array<Point, 4> Box(double x0, double y0, double x1, double y1) {
  return {{{x0, y0}, {x1, y0}, {x1, y1}, {x0, y1}}};
}

void DrawSeries(const PlotSeries& series, const std::string& panel, const Axis& x, const Axis& y, Canvas* canvas) {
  const Paint paint = {kPalette[series.colour % std::size(kPalette)]};
  const std::string name = panel + " " + series.name;
  std::vector<Point> line, upper, lower;
  bool marked = false;
  const auto flush = [&] {
    // The shade only where values were merged.
    bool merged = false;
    for (size_t i = 0; i < upper.size(); ++i) merged = merged || lower[i].y - upper[i].y > 1;
    if (merged) {
      std::vector<Point> around = upper;
      around.insert(around.end(), lower.rbegin(), lower.rend());
      canvas->Polygon(around, {paint.rgb, 0.2});
    }
    if (line.size() == 1) line.push_back({line[0].x + 1, line[0].y});
    if (!line.empty()) canvas->Line(line, paint, 1.4, false, name);
    line.clear();
    upper.clear();
    lower.clear();
  };
  for (size_t i = 0; i < series.step.size(); ++i) {
    const double at = x.At(series.step[i]);
    if (!std::isfinite(series.mean[i]) || !std::isfinite(series.low[i]) || !std::isfinite(series.high[i])) {
      flush();
      if (!marked) {
        const Point mark[] = {{at - 4, y.to}, {at + 4, y.to}, {at, y.to + 8}};
        canvas->Polygon(mark, paint);
      }
      marked = true;
      continue;
    }
    line.push_back({at, y.At(series.mean[i])});
    upper.push_back({at, y.At(series.high[i])});
    lower.push_back({at, y.At(series.low[i])});
  }
  flush();
}

void DrawPanel(const PlotPanel& panel, const Axis& x, double top, double bottom, Canvas* canvas) {
  Axis y = ValueAxis(panel);
  y.from = bottom;
  y.to = top;
  for (const double tick : Ticks(y, std::max(2, static_cast<int>((bottom - top) / 22)))) {
    const double at = y.At(tick);
    if (at < top - 1 || at > bottom + 1) continue;
    const Point line[] = {{x.from, at}, {x.to, at}};
    canvas->Line(line, kGrid, 1, false, "");
    canvas->Text({x.from - 6, at + 4}, Number(tick, 3), Anchor::kEnd, kText - 1, false, kFaint);
  }
  for (const PlotSeries& series : panel.series) DrawSeries(series, panel.title, x, y, canvas);
  const std::array<Point, 4> corners = Box(x.from, top, x.to, bottom);
  const Point frame[] = {corners[0], corners[1], corners[2], corners[3], corners[0]};
  canvas->Line(frame, kFaint, 1, false, "");
  canvas->Text({x.from + 6, top + 14}, panel.title + (y.logarithmic ? " (log)" : ""), Anchor::kStart, kText, true,
               kInk);
}

void DrawSpans(const Plot& plot, const Axis& x, double top, double panels_top, double bottom, Canvas* canvas) {
  double lane = top;
  for (const PlotSpan& span : plot.spans) {
    if (span.end < plot.step_begin || span.begin > plot.step_end) continue;
    const double begin = x.At(std::clamp(span.begin, plot.step_begin, plot.step_end));
    const double end = std::max(x.At(std::clamp(span.end, plot.step_begin, plot.step_end)), begin + 2);
    canvas->Polygon(Box(begin, lane + 1, end, lane + kLaneHeight - 2), {span.rgb, 0.8});
    if (span.shade) canvas->Polygon(Box(begin, panels_top, end, bottom), {span.rgb, 0.06});
    // Where there is room: behind the middle of the axis the words stand left.
    const bool left = begin > (x.from + x.to) / 2;
    canvas->Text({left ? begin - 4 : begin + 4, lane + kLaneHeight - 4}, span.text,
                 left ? Anchor::kEnd : Anchor::kStart, kText - 1, false, kInk);
    lane += kLaneHeight;
  }
}

}  // namespace

void Draw(const Plot& plot, int width, int height, Canvas* canvas) {
  const Axis x{.begin = plot.step_begin, .end = plot.step_end, .from = kLeft, .to = width - kRight};
  canvas->Text({kLeft, 20}, plot.title, Anchor::kStart, 15, true, kInk);
  canvas->Text({kLeft, 37}, plot.subtitle, Anchor::kStart, kText, false, kFaint);
  const auto lanes = std::count_if(plot.spans.begin(), plot.spans.end(), [&plot](const PlotSpan& span) {
    return span.end >= plot.step_begin && span.begin <= plot.step_end;
  });
  const double top = kTop + kLaneHeight * static_cast<double>(lanes) + (lanes == 0 ? 0 : 4);
  const double bottom = height - kBottom;
  DrawSpans(plot, x, kTop, top, bottom, canvas);
  if (plot.predicted) {
    const double begin = std::clamp(plot.expected_low, plot.step_begin, plot.step_end);
    const double end = std::clamp(plot.expected_high, plot.step_begin, plot.step_end);
    canvas->Polygon(Box(x.At(begin), top, x.At(end), bottom), {kExpected.rgb, 0.1});
  }
  for (const double tick : Ticks(x, 8)) {
    const Point line[] = {{x.At(tick), top}, {x.At(tick), bottom}};
    canvas->Line(line, kGrid, 1, false, "");
    canvas->Text({x.At(tick), bottom + 15}, Number(tick, 8), Anchor::kMiddle, kText - 1, false, kFaint);
  }
  canvas->Text({(x.from + x.to) / 2, bottom + 29}, "step", Anchor::kMiddle, kText, false, kFaint);

  const auto count = static_cast<double>(std::max<size_t>(plot.panels.size(), 1));
  const double panel_height = (bottom - top - kPanelGap * (count - 1)) / count;
  double at = top;
  std::vector<std::pair<std::string, size_t>> legend;
  for (const PlotPanel& panel : plot.panels) {
    DrawPanel(panel, x, at, at + panel_height, canvas);
    at += panel_height + kPanelGap;
    for (const PlotSeries& series : panel.series) {
      const std::pair<std::string, size_t> entry(series.name, series.colour);
      if (std::find(legend.begin(), legend.end(), entry) == legend.end()) legend.push_back(entry);
    }
  }
  if (plot.predicted && plot.expected <= plot.step_end) {
    const double line_x = x.At(plot.expected);
    const Point line[] = {{line_x, top}, {line_x, bottom}};
    canvas->Line(line, kExpected, 1.4, true, "expected divergence");
    canvas->Text({line_x - 4, bottom - 6}, "expected divergence", Anchor::kEnd, kText - 1, false, kExpected);
  }
  double entry_y = top + 12;
  for (const auto& [name, colour] : legend) {
    const Point line[] = {{x.to + 10, entry_y - 4}, {x.to + 28, entry_y - 4}};
    canvas->Line(line, {kPalette[colour % std::size(kPalette)]}, 2.5, false, "");
    canvas->Text({x.to + 33, entry_y}, name, Anchor::kStart, kText, false, kInk);
    entry_y += 16;
  }
}

}  // namespace bellwether::cli
