// The page of a server that is built without one (BELLWETHER_CONSOLE=OFF).
#include "server/http/console_assets.h"

namespace bellwether::server {

std::span<const ConsoleAsset> ConsoleAssets() { return {}; }

const ConsoleAsset* FindConsoleAsset(std::string_view) { return nullptr; }

}  // namespace bellwether::server
