// nearest.h: what a mistyped word may have meant.

#ifndef BELLWETHER_CLI_NEAREST_H_
#define BELLWETHER_CLI_NEAREST_H_

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace bellwether::cli {

// Those of `known` that are near `word`, the nearest first, three at most: a few letters changed,
// added, left out or swapped, or one is the beginning of the other.
std::vector<std::string> Nearest(std::string_view word, const std::vector<std::string>& known);
// "; did you mean a or b?", empty if nothing is near.
std::string DidYouMean(std::string_view word, const std::vector<std::string>& known);

// The subcommand of `app` that has this name; null = none.
const CLI::App* FindCommand(const CLI::App* app, const std::string& name);
std::vector<std::string> CommandNames(const CLI::App* app);
// Why these words name no command; empty if they do.
std::string WhyNoCommand(const CLI::App* root, const std::vector<std::string>& words);
// Which run, alert or action is missing in these words, and which command lists them; empty if none is.
std::string WhichIsMissing(const CLI::App* root, const std::vector<std::string>& words);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_NEAREST_H_
