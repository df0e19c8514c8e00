#include <cairo.h>
#include <dlfcn.h>

#include <utility>

#include "cli/canvas.h"

namespace bellwether::cli {
namespace {

constexpr char kLibrary[] = "libcairo.so.2";

// The functions of cairo that we call, by their own names and types.
// clang-format off
#define BELLWETHER_CAIRO_FUNCTIONS(F)                                                  \
  F(cairo_create) F(cairo_destroy) F(cairo_status) F(cairo_status_to_string)           \
  F(cairo_image_surface_create) F(cairo_surface_destroy) F(cairo_surface_write_to_png) \
  F(cairo_paint) F(cairo_set_source_rgba) F(cairo_set_line_width)                      \
  F(cairo_set_line_join) F(cairo_set_dash) F(cairo_move_to) F(cairo_line_to)           \
  F(cairo_close_path) F(cairo_fill) F(cairo_stroke) F(cairo_select_font_face)          \
  F(cairo_set_font_size) F(cairo_show_text) F(cairo_text_extents)
// clang-format on

struct Cairo {
#define BELLWETHER_DECLARE(name) decltype(&::name) name = nullptr;
  BELLWETHER_CAIRO_FUNCTIONS(BELLWETHER_DECLARE)
#undef BELLWETHER_DECLARE
};

// False: `*why` says what is missing.  The library stays until the end.
bool Load(Cairo* cairo, std::string* why) {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    *why =
        std::string(kLibrary) + " is not here (Debian: apt install libcairo2 fonts-dejavu-core); an .svg needs nothing";
    return false;
  }
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) *why = std::string(kLibrary) + " has no " + name;
  };
#define BELLWETHER_FIND(name) find(#name, &cairo->name);
  BELLWETHER_CAIRO_FUNCTIONS(BELLWETHER_FIND)
#undef BELLWETHER_FIND
  return why->empty();
}

class PngCanvas final : public Canvas {
 public:
  PngCanvas(const Cairo& cairo, int width, int height)
      : c_(cairo),
        surface_(c_.cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height)),
        context_(c_.cairo_create(surface_)) {
    c_.cairo_set_source_rgba(context_, 1, 1, 1, 1);
    c_.cairo_paint(context_);
    c_.cairo_set_line_join(context_, CAIRO_LINE_JOIN_ROUND);
  }
  ~PngCanvas() override {
    c_.cairo_destroy(context_);
    c_.cairo_surface_destroy(surface_);
  }

  void Polygon(std::span<const Point> points, Paint fill) override {
    Path(points);
    c_.cairo_close_path(context_);
    Source(fill);
    c_.cairo_fill(context_);
  }

  void Line(std::span<const Point> points, Paint stroke, double width, bool dashed, const std::string&) override {
    static constexpr double kDashes[] = {5, 4};
    Path(points);
    Source(stroke);
    c_.cairo_set_line_width(context_, width);
    c_.cairo_set_dash(context_, kDashes, dashed ? 2 : 0, 0);
    c_.cairo_stroke(context_);
  }

  void Text(Point at, const std::string& text, Anchor anchor, double size, bool bold, Paint fill) override {
    c_.cairo_select_font_face(context_, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                              bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
    c_.cairo_set_font_size(context_, size);
    cairo_text_extents_t extents{};
    c_.cairo_text_extents(context_, text.c_str(), &extents);
    const double part = anchor == Anchor::kStart ? 0 : anchor == Anchor::kMiddle ? 0.5 : 1;
    Source(fill);
    c_.cairo_move_to(context_, at.x - part * extents.x_advance, at.y);
    c_.cairo_show_text(context_, text.c_str());
  }

  bool Write(const std::string& path, std::string* why) override {
    // An error sticks to the context: a machine without any font, say.
    cairo_status_t status = c_.cairo_status(context_);
    if (status == CAIRO_STATUS_SUCCESS) status = c_.cairo_surface_write_to_png(surface_, path.c_str());
    if (status == CAIRO_STATUS_SUCCESS) return true;
    *why = path + ": cannot be written: cairo says: " + c_.cairo_status_to_string(status);
    return false;
  }

 private:
  void Path(std::span<const Point> points) {
    bool first = true;
    for (const Point& point : points) {
      (first ? c_.cairo_move_to : c_.cairo_line_to)(context_, point.x, point.y);
      first = false;
    }
  }
  void Source(Paint paint) {
    const auto part = [&paint](int shift) { return static_cast<double>(paint.rgb >> shift & 255) / 255; };
    c_.cairo_set_source_rgba(context_, part(16), part(8), part(0), paint.alpha);
  }

  const Cairo c_;
  cairo_surface_t* const surface_;
  cairo_t* const context_;
};

}  // namespace

std::unique_ptr<Canvas> NewPngCanvas(int width, int height, std::string* why) {
  Cairo cairo;
  if (!Load(&cairo, why)) return nullptr;
  return std::make_unique<PngCanvas>(cairo, width, height);
}

}  // namespace bellwether::cli
