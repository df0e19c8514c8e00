#include <cstdio>
#include <fstream>
#include <utility>

#include "cli/canvas.h"

namespace bellwether::cli {
namespace {

// What XML 1.0 cannot hold becomes "?".
std::string Escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
    }
  }
  return escaped;
}

std::string Pixels(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string Colour(const char* property, Paint paint) {
  char text[64];
  std::snprintf(text, sizeof text, " %s=\"#%06x\"", property, paint.rgb);
  std::string colour = text;
  if (paint.alpha < 1)
    colour.append(" ").append(property).append("-opacity=\"").append(Pixels(paint.alpha)).append("\"");
  return colour;
}

std::string Points(std::span<const Point> points) {
  std::string text = " points=\"";
  for (const Point& point : points) text.append(Pixels(point.x)).append(",").append(Pixels(point.y)).append(" ");
  if (!points.empty()) text.pop_back();
  return text + "\"";
}

class SvgCanvas final : public Canvas {
 public:
  SvgCanvas(int width, int height, const std::string& title) {
    const std::string w = std::to_string(width), h = std::to_string(height);
    text_ = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + w +
            "\" height=\"" + h + "\" viewBox=\"0 0 " + w + " " + h +
            "\" role=\"img\" font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\">\n<title>" + Escaped(title) +
            "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n";
  }

  void Polygon(std::span<const Point> points, Paint fill) override {
    text_ += "<polygon" + Points(points) + Colour("fill", fill) + "/>\n";
  }

  void Line(std::span<const Point> points, Paint stroke, double width, bool dashed, const std::string& name) override {
    text_ += "<polyline fill=\"none\"" + Points(points) + Colour("stroke", stroke) + " stroke-width=\"" +
             Pixels(width) + "\"";
    if (dashed) text_ += " stroke-dasharray=\"5 4\"";
    if (!name.empty()) text_ += " data-series=\"" + Escaped(name) + "\"";
    text_ += "/>\n";
  }

  void Text(Point at, const std::string& text, Anchor anchor, double size, bool bold, Paint fill) override {
    static constexpr const char* kAnchors[] = {"start", "middle", "end"};
    text_ += "<text x=\"" + Pixels(at.x) + "\" y=\"" + Pixels(at.y) + "\" font-size=\"" + Pixels(size) +
             "\" text-anchor=\"" + kAnchors[static_cast<int>(anchor)] + "\"" + Colour("fill", fill);
    if (bold) text_ += " font-weight=\"bold\"";
    text_ += ">" + Escaped(text) + "</text>\n";
  }

  bool Write(const std::string& path, std::string* why) override {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file << text_ << "</svg>\n";
    file.close();
    if (!file) *why = path + ": cannot be written";
    return static_cast<bool>(file);
  }

 private:
  std::string text_;
};

}  // namespace

std::unique_ptr<Canvas> NewSvgCanvas(int width, int height, const std::string& title) {
  return std::make_unique<SvgCanvas>(width, height, title);
}

}  // namespace bellwether::cli
