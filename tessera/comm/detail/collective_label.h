#pragma once
#include <cstdint>

namespace tessera::comm {

// RAII: labels the collectives that this thread posts. The name appears in records and errors. The number is part of
// the fingerprint that the ranks compare: two ranks that post the same collective for different steps get an error
// instead of each other's values (backends threads and shm).
// Example:  comm::CollectiveLabel label("pass 12, bucket 0", 12 * 4096);
class CollectiveLabel {
 public:
  CollectiveLabel(const char* name, int32_t number);  // the name must outlive the collectives
  ~CollectiveLabel();
  CollectiveLabel(const CollectiveLabel&) = delete;

  const char* name() const { return name_; }
  int32_t number() const { return number_; }
  static const CollectiveLabel* current();  // the innermost label of this thread; may be null

 private:
  const char* name_;
  int32_t number_;
  const CollectiveLabel* outer_;
};

}  // namespace tessera::comm
