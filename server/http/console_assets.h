// console_assets.h: the files of the page, inside the binary.

#ifndef BELLWETHER_SERVER_HTTP_CONSOLE_ASSETS_H_
#define BELLWETHER_SERVER_HTTP_CONSOLE_ASSETS_H_

#include <span>
#include <string_view>

namespace bellwether::server {

struct ConsoleAsset {
  std::string_view path;  // "console.js"; index.html serves "" too.
  std::string_view content_type;
  std::string_view gzipped;
  std::string_view etag;  // In quotes; changes with the content.
};

// Empty when built with BELLWETHER_CONSOLE=OFF.  Immutable.
std::span<const ConsoleAsset> ConsoleAssets();
// nullptr if there is no such file.
const ConsoleAsset* FindConsoleAsset(std::string_view path);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_CONSOLE_ASSETS_H_
