// plot.h: panels of series over steps, one below the other, and what happened
// meanwhile.

#ifndef BELLWETHER_CLI_PLOT_H_
#define BELLWETHER_CLI_PLOT_H_

#include <string>
#include <vector>

#include "cli/canvas.h"

namespace bellwether::cli {

struct PlotSeries {
  std::string name;
  size_t colour = 0;  // Of the palette; a head has the same in every panel.
  std::vector<double> step;
  // As many as steps.  Drawn: the mean as a line, low to high as a shade where
  // they differ.  What is not finite is a gap, marked at the panel's top.
  std::vector<double> low, mean, high;
};

struct PlotPanel {
  std::string title;
  std::vector<PlotSeries> series;
};

// Something that lasted from one step to another; a moment if they are equal.
struct PlotSpan {
  double begin, end;
  std::string text;
  unsigned rgb;
  bool shade;  // Also behind the panels.
};

struct Plot {
  std::string title, subtitle;
  std::vector<PlotPanel> panels;
  std::vector<PlotSpan> spans;  // A line each, above the panels.
  // The step of the expected divergence and its interval.
  bool predicted = false;
  double expected = 0, expected_low = 0, expected_high = 0;
  double step_begin = 0, step_end = 1;  // The axis.
};

void Draw(const Plot& plot, int width, int height, Canvas* canvas);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_PLOT_H_
