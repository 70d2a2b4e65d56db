/* A library with libnvshare.so's name. A macro selects the harm that the library does. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

__attribute__((used, aligned(4), section(".note.nvshare"))) static const struct {
	unsigned owner_length, length, kind;
	char owner[8], version[8];
} note = { 8, 5, 1, "nvshare", "0.1.0" };

#if defined UNRESOLVED || defined NEEDS
void part(void);
void use(void) { part(); }
#endif

__attribute__((constructor)) static void load(void)
{
#if defined PRINTS
	fputs("hello\n", stderr);
#elif defined PRINTS_TO_STDOUT
	write(1, "hello\n", 6);
#elif defined HANGS
	for (;;)
		pause();
#elif defined CRASHES
	abort();
#elif defined CRASHES_FOR_USERS
	if (getuid())
		abort();
#elif defined CRASHES_WHEN_SETUID
	if (getauxval(AT_SECURE))
		abort();
#elif defined CRASHES_IN_EARNEST
	/* In a trial run, /etc is different. */
	struct stat buffer;
	if (stat("/etc/.etc", &buffer))
		abort();
#endif
}
