/* Kills a process that is about to rename a file: loaded in front of libc by the fault tests.
   The file named by DAS_TEST_KILL has a pattern; the first rename to a path that contains it does not happen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int rename(const char *from, const char *to) {
  const char *trap = getenv("DAS_TEST_KILL");
  char pattern[256] = "";
  FILE *file = trap ? fopen(trap, "r") : NULL;
  if (file) {
    if (fgets(pattern, sizeof pattern, file) && *pattern && strstr(to, pattern) && !unlink(trap)) kill(getpid(), SIGKILL);
    fclose(file);
  }
  int (*stock)(const char *, const char *);
  *(void **)&stock = dlsym(RTLD_NEXT, "rename");
  return stock(from, to);
}
