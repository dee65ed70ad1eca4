// The C door of libtorch_ckpt_core.so: JSON in, JSON out, no torch.
//
// A request is {"op": name, ...}. The response is {"ok": {...}} or
// {"error": {"kind", "message", "errno", "file", "tensor"}}. Every function may
// be called from any thread; a call blocks until its work is done.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

// Runs a request of `size` bytes. Never fails: what goes wrong is in the
// response, a NUL-terminated string that torch_ckpt_free takes back. Null only
// when there was no memory for the response.
char* torch_ckpt_call(const char* request, size_t size);
void torch_ckpt_free(char* response);
// "major.minor.patch"; static.
const char* torch_ckpt_version(void);
}
