// The page's files, put into the binary by the assembler: GCC 12 has no #embed,
// and an array of half a million literals costs minutes.  The paths come from
// CMake, which also rebuilds this file when they change.
#include "server/http/console_assets.h"

#include <algorithm>
#include <iterator>

// Defines `symbol` and `symbol_end` around the bytes of `file`.
#define BW_EMBED(symbol, file)                                    \
  __asm__(                                                        \
      ".pushsection .rodata\n"                                    \
      ".balign 16\n"                                              \
      ".hidden " #symbol "\n.globl " #symbol "\n" #symbol         \
      ":\n"                                                       \
      ".incbin \"" file                                           \
      "\"\n"                                                      \
      ".hidden " #symbol "_end\n.globl " #symbol "_end\n" #symbol \
      "_end:\n"                                                   \
      ".popsection\n");                                           \
  extern "C" {                                                    \
  extern const char symbol[];                                     \
  extern const char symbol##_end[];                               \
  }

BW_EMBED(bw_console_index, BW_CONSOLE_FOLDER "/index.html.gz")
BW_EMBED(bw_console_script, BW_CONSOLE_FOLDER "/console.js.gz")
BW_EMBED(bw_console_style, BW_CONSOLE_FOLDER "/console.css.gz")
BW_EMBED(bw_console_icon, BW_CONSOLE_FOLDER "/favicon.svg.gz")

namespace bellwether::server {
namespace {

std::string_view Bytes(const char* begin, const char* end) { return {begin, static_cast<size_t>(end - begin)}; }

}  // namespace

std::span<const ConsoleAsset> ConsoleAssets() {
  static const ConsoleAsset kAssets[] = {
      {"index.html", "text/html; charset=utf-8", Bytes(bw_console_index, bw_console_index_end),
       "\"" BW_ETAG_INDEX "\""},
      {"console.js", "text/javascript; charset=utf-8", Bytes(bw_console_script, bw_console_script_end),
       "\"" BW_ETAG_SCRIPT "\""},
      {"console.css", "text/css; charset=utf-8", Bytes(bw_console_style, bw_console_style_end),
       "\"" BW_ETAG_STYLE "\""},
      {"favicon.svg", "image/svg+xml", Bytes(bw_console_icon, bw_console_icon_end), "\"" BW_ETAG_ICON "\""},
  };
  return kAssets;
}

const ConsoleAsset* FindConsoleAsset(std::string_view path) {
  if (path.empty()) path = "index.html";
  const std::span<const ConsoleAsset> assets = ConsoleAssets();
  const auto found =
      std::find_if(assets.begin(), assets.end(), [path](const ConsoleAsset& asset) { return asset.path == path; });
  return found == assets.end() ? nullptr : &*found;
}

}  // namespace bellwether::server
