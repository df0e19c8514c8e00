// canvas.h: what a plot is drawn on.

#ifndef BELLWETHER_CLI_CANVAS_H_
#define BELLWETHER_CLI_CANVAS_H_

#include <memory>
#include <span>
#include <string>

namespace bellwether::cli {

struct Point {
  double x, y;  // Pixels from the upper left corner.
};

struct Paint {
  unsigned rgb = 0;
  double alpha = 1;
};

enum class Anchor { kStart, kMiddle, kEnd };

class Canvas {
 public:
  virtual ~Canvas() = default;

  virtual void Polygon(std::span<const Point> points, Paint fill) = 0;
  // `name`: what the line stands for; empty = furniture.
  virtual void Line(std::span<const Point> points, Paint stroke, double width, bool dashed,
                    const std::string& name) = 0;
  // `at`: on the base line, at the anchor.
  virtual void Text(Point at, const std::string& text, Anchor anchor, double size, bool bold, Paint fill) = 0;
  // False: `*why` says what was in the way.
  virtual bool Write(const std::string& path, std::string* why) = 0;
};

// SVG is text that we write.
std::unique_ptr<Canvas> NewSvgCanvas(int width, int height, const std::string& title);

// PNG is drawn by cairo, which is loaded when it is asked for: linked, it would
// bring the libraries of a desktop to every machine that wants to ask for a
// run.  nullptr: it is not here, and `*why` says what to do.
std::unique_ptr<Canvas> NewPngCanvas(int width, int height, std::string* why);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_CANVAS_H_
