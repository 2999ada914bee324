"""First half of the worked example in AppWorld's instruction: finding the APIs and logging in.

Word for word from the paper (Appendix C.4), see [`~env_adapters.appworld.prompt`].
"""

LOGGING_IN = r"""
Let's start with the task

Task: How many playlists do I have in my Spotify playlist library?

ASSISTANT:
Okay. Let's first find which APIs are available to use in Spotify.

```python
print(apis.api_docs.show_api_descriptions(app_name='spotify'))
```

USER:
Output:
```
[
 ...
 "login : Login to your account.",
 "logout : Logout from your account.",
 ...
]
```

ASSISTANT:
Okay. Looks like I can use the `login` api. Let's find its specifications.

```python
print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))
```

USER:
Output:
```
{
 "app_name": "spotify",
 "api_name": "login",
 "path": "/spotify/auth/token",
 "method": "POST",
 "description": "Login to your account.",
 "parameters": [
  {
   "name": "username",
   "type": "string",
   "required": true,
   "description": "Your account email.",
   "default": null,
   "constraints": []
  },
  {
   "name": "password",
   "type": "string",
   "required": true,
   "description": "Your account password.",
   "default": null,
   "constraints": []
  }
 ],
 "response_schemas": {
  "success": {
   "access_token": "string",
   "token_type": "string"
  },
  "failure": {
   "message": "string"
  }
 }
}
```

ASSISTANT:
I need the supervisor's username and password. Let's see if any app can help me get that.

```python
print(apis.api_docs.show_app_descriptions())
```

USER:
Output:
```
[
 {
  "name": "api_docs",
  "description": "An app to search and explore API documentation."
 },
 {
  "name": "supervisor",
  "description": "An app to access supervisor's personal information, account credentials, addresses, payment cards, and manage the assigned task."
 },
 {
  "name": "amazon",
  "description": "An online shopping app to buy products and manage orders, returns, etc."
 },
 {
  "name": "phone",
  "description": "An app to find and manage contact information for friends, family members, etc., send and receive messages, and manage alarms."
 },
 {
  "name": "file_system",
  "description": "A file system app to create and manage files and folders."
 },
 {
  "name": "spotify",
  "description": "A music streaming app to stream songs and manage song, album and playlist libraries."
 },
 {
  "name": "venmo",
  "description": "A social payment app to send, receive and request money to and from others."
 },
 {
  "name": "gmail",
  "description": "An email app to draft, send, receive, and manage emails."
 },
 {
  "name": "splitwise",
  "description": "A bill splitting app to track and split expenses with people."
 },
 {
  "name": "simple_note",
  "description": "A note-taking app to create and manage notes"
 },
 {
  "name": "todoist",
  "description": "A task management app to manage todo lists and collaborate on them with others."
 }
]
```

ASSISTANT:
Looks like the supervisor app could help me with that.

```python
print(apis.api_docs.show_api_descriptions(app_name='supervisor'))
```

USER:
Output:
```
[
 ...
 "show_account_passwords : Show your supervisor's account passwords."
 ...
]
```

ASSISTANT:
I can use `show_account_passwords` to get the passwords. So I will call that and save it in a variable for future reference.

```python
passwords=apis.supervisor.show_account_passwords()
print(passwords)
```

USER:
Output:
```
[
 {
  "account_name": "spotify",
  "password": "dummy_spotify_pass"
 },
 {
  "account_name": "file_system",
  "password": "dummy_fs_pass"
 },
 ...
]
```

ASSISTANT:
So the Spotify password is an entry in the `passwords` list with the account_name=spotify. The login username is the supervisor's email, which I must look up via the supervisor app rather than assume.

```python
spotify_password = [p for p in passwords if p["account_name"] == "spotify"][0]["password"]
supervisor_email = apis.supervisor.show_profile()["email"]
login_result = apis.spotify.login(username=supervisor_email, password=spotify_password)
spotify_access_token = login_result["access_token"]
print(login_result)
```

USER:
Output:
```
{
 "access_token": "fake_access_token",
 "token_type": "Bearer"
}
```
""".strip()  # noqa: E501 - as printed
