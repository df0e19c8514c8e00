#include "cli/nearest.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <utility>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

constexpr size_t kNamedMax = 3;
constexpr size_t kWordMax = 128;  // Longer ones are no slip of the pen.

// Letters to change, add, leave out, or swap with the next one.
size_t LettersBetween(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> between(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) between[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) between[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      size_t least = between[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      least = std::min({least, between[i - 1][j] + 1, between[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        least = std::min(least, between[i - 2][j - 2] + 1);
      }
      between[i][j] = least;
    }
  }
  return between[a.size()][b.size()];
}

}  // namespace

std::vector<std::string> Nearest(std::string_view word, const std::vector<std::string>& known) {
  if (word.empty() || word.size() > kWordMax) return {};
  const size_t far = std::max<size_t>(word.size() / 3, 1);
  std::vector<std::pair<size_t, std::string>> near;
  for (const std::string& name : known) {
    if (name.size() > kWordMax || name == word) continue;
    const std::string_view shorter = name.size() < word.size() ? std::string_view(name) : word;
    const bool begins = shorter.size() > 1 && name.substr(0, shorter.size()) == word.substr(0, shorter.size());
    const size_t letters = LettersBetween(word, name);
    if (letters <= far) near.emplace_back(letters, name);
    if (letters > far && begins) near.emplace_back(far + 1, name);
  }
  std::sort(near.begin(), near.end());
  near.erase(std::unique(near.begin(), near.end()), near.end());
  std::vector<std::string> names;
  for (auto& [letters, name] : near) {
    if (names.size() < kNamedMax) names.push_back(std::move(name));
  }
  return names;
}

std::string DidYouMean(std::string_view word, const std::vector<std::string>& known) {
  const std::vector<std::string> names = Nearest(word, known);
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + names[i];
  }
  return text.empty() ? "" : "; did you mean " + text + "?";
}

const CLI::App* FindCommand(const CLI::App* app, const std::string& name) {
  for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

std::vector<std::string> CommandNames(const CLI::App* app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

std::string WhyNoCommand(const CLI::App* root, const std::vector<std::string>& words) {
  const CommandWords found = WalkCommand(root, words);
  const std::vector<std::string> names = CommandNames(found.command);
  if (names.empty()) return "";
  const std::string noun = found.command == root ? "" : found.command->get_name() + ": ";
  if (!found.positionals.empty()) {
    const std::string& word = found.positionals.front();
    std::string nearest = DidYouMean(word, names);
    // The words in the other order, as "check policy" of "policy check".
    const CLI::App* const other = found.command == root ? nullptr : FindCommand(root, word);
    if (other != nullptr && FindCommand(other, found.command->get_name()) != nullptr) {
      nearest = "; did you mean " + word + " " + found.command->get_name();
    }
    // A verb of a noun, as "explain" of "run explain".
    for (const std::string& name : nearest.empty() && found.command == root ? names : std::vector<std::string>()) {
      if (FindCommand(FindCommand(root, name), word) == nullptr) continue;
      nearest += (nearest.empty() ? "; did you mean " : " or ") + name + " " + word;
    }
    if (!nearest.empty() && nearest.back() != '?') nearest += "?";
    std::string all;
    for (const std::string& name : names) all += (all.empty() ? "; its commands are " : ", ") + name;
    return noun + "\"" + word + "\" is no command" +
           (!nearest.empty()        ? nearest
            : found.command == root ? ""
                                    : all) +
           " (see --help)";
  }
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return noun + "a command is missing, one of " + all + " (see --help)";
}

std::string WhichIsMissing(const CLI::App* root, const std::vector<std::string>& words) {
  const CommandWords found = WalkCommand(root, words);
  std::vector<std::string> needed;
  for (const CLI::Option* const option : found.command->get_options()) {
    if (option->get_positional() && option->get_required()) needed.push_back(option->get_name());
  }
  if (found.positionals.size() >= needed.size()) return "";
  const std::string& missing = needed[found.positionals.size()];
  const std::string run = found.positionals.empty() ? "RUN" : found.positionals.front();
  std::string list;
  if (missing == "run" || missing == "baseline") list = "run list";
  if (missing == "key") list = "alert list --run " + run;
  if (missing == "id") list = "action list " + run;
  if (list.empty()) return "";
  const std::string what = missing == "key" ? "an alert's key" : missing == "id" ? "an action's id" : "a run";
  return found.command->get_parent()->get_name() + " " + found.command->get_name() + ": " + what +
         " is missing (see bellwether " + list + ")";
}

}  // namespace bellwether::cli
