#pragma once
#include <functional>
#include <optional>
#include <string>

// Results that take long to find, kept between processes: compiled kernels and chosen algorithms. The layer above that
// has a folder for them gives the functions; without it every process finds its results anew.
namespace tessera::cuda {

struct ResultCache {
  std::function<std::optional<std::string>(const std::string& key)> read;
  std::function<void(const std::string& key, const std::string& result)> write;
};
void use_result_cache(ResultCache cache);

// The result of an earlier call or process with this key, which says all that the result depends on; or else make().
std::string cached_result(const std::string& key, const std::function<std::string()>& make);

}  // namespace tessera::cuda
