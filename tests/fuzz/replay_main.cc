// A fuzz target without a fuzzer: runs every file of the folders that it is given,
// then seeded mutations of them (bytes flipped, cut, doubled, spliced), so that
// every build and every sanitizer sees the corpus and what lies around it.
//
//   fuzz_NAME CORPUS... [--mutations=N] [--seed=N]      also: single files, to reproduce

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void Run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::string Mutate(std::string input, const std::vector<std::string>& corpus, std::mt19937_64* random) {
  const auto below = [random](size_t n) { return n == 0 ? 0 : static_cast<size_t>((*random)() % n); };
  for (size_t changes = 1 + below(6); changes > 0; --changes) {
    const size_t at = below(input.size() + 1);
    switch (below(6)) {
      case 0:
        if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:
        if (at < input.size()) input[at] = static_cast<char>((*random)());
        break;
      case 2:
        input.erase(at, below(16));
        break;
      case 3:
        input.insert(at, input.substr(below(input.size() + 1), below(32)));
        break;
      case 4:
        input.insert(at, 1 + below(8), "\0\xff\x7f\x80"[below(4)]);
        break;
      default: {
        const std::string& other = corpus[below(corpus.size())];
        input = input.substr(0, at) + other.substr(below(other.size() + 1));
      }
    }
  }
  return input.substr(0, size_t{1} << 20);
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t mutations = 3000, seed = 20261122;
  std::vector<std::string> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--mutations=", 0) == 0) {
      mutations = std::strtoull(word.c_str() + 12, nullptr, 10);
    } else if (word.rfind("--seed=", 0) == 0) {
      seed = std::strtoull(word.c_str() + 7, nullptr, 10);
    } else if (std::filesystem::is_directory(word)) {
      std::vector<std::filesystem::path> files;
      for (const auto& entry : std::filesystem::directory_iterator(word)) files.push_back(entry.path());
      std::sort(files.begin(), files.end());
      for (const auto& file : files) corpus.push_back(ReadFile(file));
    } else {
      corpus.push_back(ReadFile(word));
      mutations = 0;
    }
  }
  if (corpus.empty()) {
    std::fprintf(stderr, "no corpus: name a folder of inputs\n");
    return 2;
  }
  std::printf("%zu inputs, %llu mutations, seed %llu\n", corpus.size(), static_cast<unsigned long long>(mutations),
              static_cast<unsigned long long>(seed));
  for (const std::string& input : corpus) Run(input);
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < mutations; ++i) Run(Mutate(corpus[random() % corpus.size()], corpus, &random));
  return 0;
}
